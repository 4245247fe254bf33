"""From a tuned plan to the files that are deployed, a machine's checks, and running servers."""
