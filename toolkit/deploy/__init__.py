"""From a tuned profile to the files that are deployed."""
