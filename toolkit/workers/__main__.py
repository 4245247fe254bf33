"""`python -m toolkit.workers FD`: a worker's process.

It ensures that it ends with its front before it imports anything that takes time.
"""

import sys

from toolkit.processes.channel import Alive
from toolkit.processes.lifeline import LifeSigns, channel_to_parent, end_with_parent


def main() -> int:
    """Serve the socket with the file descriptor in the only argument."""
    end_with_parent()
    channel = channel_to_parent()
    signs = LifeSigns(lambda: channel.send(Alive()))
    from toolkit.workers.child import run

    return run(channel, signs)


if __name__ == "__main__":
    sys.exit(main())
