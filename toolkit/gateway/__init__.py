"""One front before several replicas: routes requests, and moves them when a replica fails."""
