"""The environment with the unmodified SGLang components: made once, in the cache, on request.

They are pinned, and installed without what they ask for, since that would bring a CUDA build of
torch; what their disaggregation needs to be imported on a CPU follows by name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from pdrt.config import cache_folder

SGLANG = "sglang==0.5.23"
#: Installed with what they depend on.
WHOLE = """
torch==2.13.0 torchvision nixl-cu12==1.5.1 transformers==5.19.0 compressed-tensors==0.18.0
apache-tvm-ffi==0.1.11 numpy scipy numba triton einops msgspec pyzmq aiohttp requests psutil
pybase64 pydantic fastapi uvicorn uvloop orjson pillow setproctitle prometheus-client xxhash
zstandard regex tiktoken nvidia-ml-py partial_json_parser python-multipart dill cloudpickle IPython
interegular
"""
#: Installed alone: their own dependencies are not needed, or would replace the above.
ALONE = f"""
{SGLANG} nixl==1.5.1 sentencepiece==0.2.1 gguf openai==2.8.0 jiter sniffio distro httpx httpcore
anthropic docstring-parser blobfile==3.0.0 pycryptodomex lxml easydict mistral_common
pydantic-extra-types pycountry jsonschema jsonschema-specifications referencing rpds-py watchfiles
xgrammar==0.2.7 llguidance soundfile==0.13.1 cffi pycparser timm==1.0.25 kernels==0.14.1
openai-harmony==0.0.4
"""
PROBE = (
    "import stock_engine; stock_engine.spare_torchvision(); "
    "from sglang.srt.disaggregation import utils; import sglang.srt.server_args"
)


def python() -> Path:
    """The environment's interpreter; makes the environment if it is not there.  Takes 1 to 5
    minutes and 3 GB then.  Raises CalledProcessError."""
    folder = cache_folder() / f"stock-{SGLANG.replace('==', '-')}"
    interpreter, stamp = folder / "bin" / "python", folder / "complete"
    if stamp.exists() and stamp.read_text() == WHOLE + ALONE:
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder} (3 GB): {SGLANG} and what it imports", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-compile", *WHOLE.split()], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "--no-compile", "--no-deps", *ALONE.split()], check=True)
    # The first import compiles what is imported: not in a measurement.
    subprocess.run([str(interpreter), "-c", PROBE], check=True, cwd=Path(__file__).parent)
    stamp.write_text(WHOLE + ALONE)
    return interpreter
