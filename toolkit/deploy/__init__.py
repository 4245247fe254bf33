"""From a tuned plan to the files that are deployed, the checks of a machine, and running servers."""
