"""Places to deploy to: from an order to files, their explanation, and how to start."""
