"""Places to deploy to, a file each: from an order to files, their explanation, and how to start."""
