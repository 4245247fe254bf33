"""Which newcomers are worth one padded prefill together: those of similar length (BATON, section 4.2).

One rule for the engine that makes the passes and for the simulated worker that costs them.
"""

from __future__ import annotations

from collections.abc import Sequence

# A row joins a group if the padding that it brings is less than this, or than this share of the longest: as much as a
# forward call of its own would cost on top.
PADDING_TOKENS = 32
PADDING_SHARE = 0.25


def alike(lengths: Sequence[int], limit: int | None = None) -> list[int]:
    """Indices of those who share a pass with the first: lengths that span little, nearest to the first one's first.

    Args:
        lengths: tokens of each, oldest first; at least one.
        limit: the most tokens of the pass, padding counted; the first goes whatever its length. None: no limit.
    """
    first = lengths[0]
    low = high = first
    members: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda k: abs(lengths[k] - first)):  # stable: oldest first
        low, high = min(low, lengths[index]), max(high, lengths[index])
        too_wide = high - low > max(PADDING_TOKENS, PADDING_SHARE * high)
        if too_wide or (members and limit is not None and high * (len(members) + 1) > limit):
            break
        members.append(index)
    return members


def groups_alike(lengths: Sequence[int]) -> list[list[int]]:
    """All indices, in groups of like length; each begins with the oldest that no group before it took."""
    left, groups = list(range(len(lengths))), []
    while left:
        members = [left[k] for k in alike([lengths[index] for index in left])]
        groups.append(members)
        taken = set(members)
        left = [index for index in left if index not in taken]
    return groups
