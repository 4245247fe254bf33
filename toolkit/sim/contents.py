"""What requests share: a tree of their contents. Its nodes (`toolkit.sim.kv_cache.Node`) are
stretches of tokens that the same requests have in common; it forks where two requests part.

Two requests share a block if all tokens up to its end are the same, so that the block belongs to
the node of its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolkit.sim.kv_cache import Node
from toolkit.traces.types import SharedBlocks


def copy_of(leaf: Node, copies: dict[Node, Node]) -> Node:
    """One replica's copy of a node of all requests' contents and of those before it, since each
    replica caches blocks of its own. `copies` are those that the replica has; new ones are added.
    """
    path: list[Node] = []
    node: Node | None = leaf
    while node is not None and node not in copies:
        path.append(node)
        node = node.parent
    copy: Node | None = copies[node] if node is not None else None
    for own in reversed(path):
        copy = copies[own] = Node(copy, own.start, own.end)
    assert copy is not None
    return copy


def contents(
    prompts: Sequence[int],
    outputs: Sequence[int],
    shared: SharedBlocks | None,
    previous: Sequence[int] | None,
    lookahead: int = 0,
) -> tuple[list[Node], list[bool]]:
    """The last node of each request's content (prompt, then output), and whether other prompts have
    tokens of its output.

    Prompts are equal as far as their first blocks in `shared` are, with a partial block as far as
    it goes. A prompt with a `previous` row begins with the prompt and the output of that earlier
    row. Of two such beginnings the longer counts. All else is its own. A block is the same only if
    the `lookahead` tokens behind it are.
    """
    leaves: list[Node] = []
    continued = [False] * len(prompts)
    known, owners = _known_blocks(shared, len(prompts))
    size = shared.block_tokens if shared is not None else 1
    longest: dict[int, int] = {}  # a block's id to a row that has more of it than its first owner
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        begins = 0
        owner = -1
        if shared is not None and known[row]:
            count = known[row]
            last = int(shared.ids[shared.offsets[row] + count - 1])
            owner = longest.get(last, owners[row])
            begins = min(count * size, prompt, prompts[owner])
            if prompts[owner] < min(count * size, prompt):
                longest[last] = row
        before = previous[row] if previous is not None else -1
        if before >= 0:
            common = min(prompts[before] + outputs[before], prompt)
            if common > begins:
                begins = common
                owner = before
        parent: Node | None = None
        begins = max(begins - lookahead, 0)
        if begins:
            parent = leaves[owner].until(begins)
            if begins > prompts[owner]:
                continued[owner] = True
        leaves.append(Node(parent, begins, prompt + output))
    return leaves, continued


def _known_blocks(shared: SharedBlocks | None, count: int) -> tuple[list[int], list[int]]:
    """For each prompt, how many of its first blocks earlier prompts have, and the first prompt that
    had the last of these.
    """
    if shared is None or not len(shared.ids):
        return [0] * count, [-1] * count
    rows = np.repeat(np.arange(count), shared.counts)
    _, place, which = np.unique(shared.ids, return_index=True, return_inverse=True)
    first = rows[place][which.reshape(-1)]  # the first row that has each block
    sums = np.concatenate([[0], np.cumsum(first < rows)])
    known = sums[shared.offsets[1:]] - sums[shared.offsets[:-1]]
    ends = np.maximum(shared.offsets[:-1] + known - 1, 0)
    return known.tolist(), np.where(known > 0, first[ends], -1).tolist()
