"""A request as a scheduler with several cache groups has it, and its blocks in one group."""

from __future__ import annotations

from bisect import bisect_left

from toolkit.sim.blocks import Node, PagedRequest
from toolkit.sim.groups.pool import Block


class BlockTable:
    """A row's blocks in one group, by place: block k holds the tokens from k times the group's
    block on.

    Attributes:
        length: places so far.
        gone: the blocks at the first so many places were given back.
        keyed: the blocks with a key. All others from `gone` on are without.
        looked: up to this place it is settled which blocks have keys.
    """

    __slots__ = ("gone", "keyed", "length", "looked")

    def __init__(self) -> None:
        self.length = 0
        self.gone = 0
        self.looked = 0
        self.keyed: dict[int, Block] = {}


class GroupRow:
    """A request.

    Attributes:
        request: as the caller knows it.
        prompt: its tokens when it came.
        known: its tokens with known values: the prompt and what it has generated.
        end: `known` when it ends.
        computed: tokens in its cache after all planned passes.
        in_flight: tokens of passes with an output that is not known yet.
        sampled: tokens that passes under way will give.
        stale: of `in_flight`, tokens of a row that was preempted meanwhile.
        is_chunk: its input is not complete with the last planned pass.
        runs, ended: whether it is among the running rows; whether it has ended.
        preempted: whether it ever was.
        in_pass: the number of the last pass that gave it a token; 0: none since it was admitted.
        junction: tokens that some group has of its beginning beyond what all groups have; 0: none.
        tables: by group.
        order: how many requests were admitted before it and with it.
        decodes: passes in a row in which it decoded.
        is_steady: it decodes in step (`toolkit.sim.groups.steady`), and `computed`, `known`,
            `in_flight` and `sampled` are not kept up; with the passes at which it joined and ends:
        base: `computed` less the passes so far.
        last_pass: the pass that gives its last token.
        awake: in which rhythms it gives blocks back, a bit each.
        is_growing: it has less than a window.
    """

    __slots__ = (
        "_ends", "_path", "awake", "base", "computed", "decodes", "end", "ended", "in_flight",
        "in_pass", "is_chunk", "is_growing", "is_steady", "junction", "known", "last_pass",
        "order", "preempted", "prompt", "request", "runs", "sampled", "stale", "tables",
    )  # fmt: skip

    def __init__(self, request: PagedRequest) -> None:
        self.request = request
        self.prompt = self.known = request.prompt
        self.end = request.prompt + request.left
        self.computed = self.in_flight = self.sampled = self.stale = self.junction = 0
        self.in_pass = self.order = self.decodes = 0
        self.base = self.last_pass = self.awake = 0
        self.is_steady = self.is_growing = False
        self.is_chunk = self.runs = self.ended = self.preempted = False
        self.tables: list[BlockTable] = []
        path: list[Node] = []
        node = request.content
        while node is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        self._path = path or [Node(None, 0, request.prompt + request.left)]
        self._ends = [one.end for one in self._path]

    @property
    def path(self) -> list[Node]:
        """The nodes of its content, from its first token on."""
        return self._path

    def node(self, end: int) -> Node:
        """The node of the token before `end`."""
        return self._path[bisect_left(self._ends, end)]
