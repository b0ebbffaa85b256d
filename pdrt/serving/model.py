"""A Hugging Face causal LM whose keys and values live in the paged pools, and nowhere else.

One `forward` runs one packed row of tokens: any mix of prefill chunks and decode positions of
different requests.  In every layer the attention below first writes the new keys and values into
the pool, then reads each request's whole context back from it:

    pool of rank r   [page][layer of r][key, value][token][kv head][head_dim]
    as items         [page * layer * 2][page_size, kv_heads, head_dim]            gathered by page
    as token rows    [page * layer * 2 * page_size][kv_heads, head_dim]           written by token

What the transfer workers send is therefore exactly what attention would have read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdrt.errors import BadModel
from pdrt.protocol.layout import Layout
from pdrt.serving.feed import Feed

ATTENTION_NAME = "pdrt_paged"
Between = Callable[[], None]


@dataclass(frozen=True)
class _Read:
    """Where one feed's queries and context lie in the packed row and the gathered items."""

    first: int  # of the feed's tokens in the packed row
    last: int  # one past
    first_item: int  # of its pages among the gathered key items
    last_item: int
    context_tokens: int
    mask: Tensor | None  # float [tokens, context_tokens]; None: from position 0, or one token


@dataclass(frozen=True)
class _Step:
    """One forward, worked out once for all layers.  Index tensors: one a rank, for its layer 0."""

    token_rows: list[Tensor]  # int64 [tokens]: rows that receive keys; values lie page_size further
    item_rows: list[Tensor]  # int64 [2 * pages]: items to gather, keys of all feeds, then values
    gathered: Tensor  # [2 * pages, page_size, kv_heads, head_dim]: the same memory for every layer
    reads: list[_Read]
    between: Between


class _RankPool:
    """One rank's pool as two tensor views over the same shared bytes."""

    def __init__(self, memory: memoryview, layout: Layout, rank: int) -> None:
        self.layers = layout.layers_of(rank)
        page_bytes = layout.page_bytes(rank)
        self.pages_count = len(memory) // page_bytes
        used = memory[: self.pages_count * page_bytes]
        flat = torch.frombuffer(used, dtype=getattr(torch, layout.dtype))
        item_shape = (layout.page_size, layout.kv_heads, layout.head_dim)
        self.items = flat.view(-1, *item_shape)
        self.tokens = flat.view(-1, layout.kv_heads, layout.head_dim)
        self.items_of_page = len(self.layers) * 2


class PagedModel:
    """The model and its pools.  One thread calls it; it owns no page and frees none."""

    def __init__(
        self, folder: Path, layout: Layout, pools: Sequence[memoryview], *, threads: int
    ) -> None:
        """Load the weights.  `pools` holds one writable view a rank.  Raises BadModel."""
        torch.set_num_threads(threads)
        self.layout = layout
        self._pools = [_RankPool(memory, layout, rank) for rank, memory in enumerate(pools)]
        self._place = [
            (rank, layer - pool.layers.start)
            for rank, pool in enumerate(self._pools)
            for layer in pool.layers
        ]
        self.pages_count = min(pool.pages_count for pool in self._pools)
        self._model = _load(folder, layout)
        self.vocab_size: int = self._model.config.vocab_size

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Feed], between: Between = lambda: None
    ) -> NDArray[np.float32]:
        """Run a packed batch; its keys and values are in the pool when this returns.

        Returns logits [feeds that want them, vocab] of each such feed's last token.  `between` is
        called once a layer, so that a long forward need not delay what cannot wait.
        """
        step = self._plan(batch, between)
        ids = torch.tensor([[token for feed in batch for token in feed.tokens]])
        positions = torch.cat(
            [torch.arange(feed.start, feed.start + len(feed.tokens)) for feed in batch]
        )
        hidden = self._model.model(
            input_ids=ids,
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            pdrt_model=self,
            pdrt_step=step,
        ).last_hidden_state
        rows = [
            read.last - 1 for read, feed in zip(step.reads, batch, strict=True) if feed.wants_logits
        ]
        if not rows:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        logits: Tensor = self._model.lm_head(hidden[0, rows])
        return logits.float().numpy()

    def warm_up(self, page: int) -> None:
        """Run one page of tokens through a page nobody uses, so the first request is not slow."""
        pages = np.array([page], dtype=np.int32)
        for tokens_count in (self.layout.page_size, 1):
            self.forward([Feed([0] * tokens_count, 0, pages)])

    def _plan(self, batch: Sequence[Feed], between: Between) -> _Step:
        size = self.layout.page_size
        reads: list[_Read] = []
        pages_read: list[NDArray[np.int32]] = []
        pages_written: list[NDArray[np.int64]] = []
        first = first_item = 0
        for feed in batch:
            context_tokens = feed.start + len(feed.tokens)
            positions = np.arange(feed.start, context_tokens)
            pages = feed.pages[: self.layout.pages_for(context_tokens)]
            pages_read.append(pages)
            pages_written.append(pages.astype(np.int64)[positions // size])
            last, last_item = first + len(feed.tokens), first_item + len(pages)
            mask = _mask(feed.start, len(feed.tokens), self.layout.dtype)
            reads.append(_Read(first, last, first_item, last_item, context_tokens, mask))
            first, first_item = last, last_item
        offsets = np.concatenate(
            [np.arange(feed.start, feed.start + len(feed.tokens)) % size for feed in batch]
        )
        written = np.concatenate(pages_written)
        read = np.concatenate(pages_read).astype(np.int64)
        token_rows, item_rows = [], []
        for pool in self._pools:
            token_rows.append(torch.from_numpy(written * pool.items_of_page * size + offsets))
            keys = read * pool.items_of_page
            item_rows.append(torch.from_numpy(np.concatenate([keys, keys + 1])))
        gathered = self._pools[0].items.new_empty(2 * len(read), *self._pools[0].items.shape[1:])
        return _Step(token_rows, item_rows, gathered, reads, between)

    def attend(
        self, step: _Step, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Write keys and values [kv_heads, tokens, head_dim]; attend with queries.

        Queries are [heads, tokens, head_dim].  Returns [tokens, heads, head_dim].
        """
        step.between()
        rank, layer_of_rank = self._place[layer]
        pool = self._pools[rank]
        rows = step.token_rows[rank] + layer_of_rank * 2 * self.layout.page_size
        pool.tokens.index_copy_(0, rows, key.transpose(0, 1))
        pool.tokens.index_copy_(0, rows + self.layout.page_size, value.transpose(0, 1))
        item_rows = step.item_rows[rank] + layer_of_rank * 2
        torch.index_select(pool.items, 0, item_rows, out=step.gathered)
        context = step.gathered.view(2, -1, *step.gathered.shape[1:])
        heads, tokens_count, head_dim = query.shape
        answer = query.new_empty(tokens_count, heads, head_dim)
        for read in step.reads:
            answer[read.first : read.last] = _attend_one(
                read, query[:, read.first : read.last], context, scaling
            )
        return answer


def _attend_one(read: _Read, query: Tensor, context: Tensor, scaling: float) -> Tensor:
    """Attention of one feed: query [heads, tokens, head_dim] -> [tokens, heads, head_dim]."""
    heads, tokens_count, head_dim = query.shape
    kv_heads = context.shape[3]
    items = context[:, read.first_item : read.last_item].flatten(1, 2)  # [2, tokens, kv head, dim]
    keys, values = items[:, : read.context_tokens].transpose(1, 2).unsqueeze(2)
    if tokens_count == 1:
        # The heads that share a kv head become its queries: no copy of the context.
        answer = scaled_dot_product_attention(
            query.reshape(kv_heads, 1, -1, head_dim), keys, values, scale=scaling
        )
        return answer.reshape(1, heads, head_dim)
    shape = (kv_heads, heads // kv_heads, read.context_tokens, head_dim)
    answer = scaled_dot_product_attention(
        query.reshape(*shape[:2], tokens_count, head_dim),
        keys.expand(shape),
        values.expand(shape),
        attn_mask=read.mask,
        is_causal=read.mask is None,
        scale=scaling,
    )
    return answer.reshape(heads, tokens_count, head_dim).transpose(0, 1)


def _mask(start: int, tokens_count: int, dtype: str) -> Tensor | None:
    """Additive mask [tokens, start + tokens] of a chunk from `start` on; None if not needed."""
    if start == 0 or tokens_count == 1:
        return None
    mask = torch.full((tokens_count, start + tokens_count), -torch.inf, dtype=getattr(torch, dtype))
    return mask.triu_(diagonal=start + 1)


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    pdrt_model: PagedModel,
    pdrt_step: _Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; query [1, heads, tokens, head_dim]."""
    answer = pdrt_model.attend(pdrt_step, module.layer_idx, query[0], key[0], value[0], scaling)
    return answer.unsqueeze(0), None


def _load(folder: Path, layout: Layout) -> Any:
    # Imported here: this takes seconds, and only the engine process pays it.
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import logging

    logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, layout.dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadModel(f"{folder}: the model cannot be loaded: {error}") from error
    return model.eval()
