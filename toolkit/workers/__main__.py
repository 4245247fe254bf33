"""`python -m toolkit.workers FD`: a worker's process, tied to its front before it imports anything
that takes time.
"""

import socket
import sys

from toolkit.workers.lifeline import ALIVE, FrontSocket, LifeSigns, end_with_front


def main() -> int:
    """Serve the socket whose file descriptor is the only argument."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    end_with_front(sock.fileno())
    line = FrontSocket(sock)
    signs = LifeSigns(lambda: line.send(ALIVE))
    from toolkit.workers.child import run

    return run(line, signs)


if __name__ == "__main__":
    sys.exit(main())
