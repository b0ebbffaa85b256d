"""A runtime without an engine and without a model, with settings that the command line has not."""

from __future__ import annotations

import json
import logging
import sys

import msgspec

from pdrt.config import Settings, default_environment
from pdrt.protocol.layout import Layout
from pdrt.runtime import Runtime

PAGE_TOKENS, KV_HEADS, HEAD_DIM = 64, 4, 128
LAYOUT = Layout(
    model="crash",
    layers=1,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    dtype="float32",
    page_size=PAGE_TOKENS,
    ranks=1,
)  # a page is 256 KiB
PAGES_COUNT = 320


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    default_environment({"UCX_TLS": "tcp,self"})
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s pid=%(process)d %(message)s"
    )
    with Runtime(settings, LAYOUT, None) as runtime:
        sys.stdout.write(json.dumps({"pdrt": runtime.facts()}) + "\n")
        sys.stdout.flush()
        runtime.run()


if __name__ == "__main__":
    main()
