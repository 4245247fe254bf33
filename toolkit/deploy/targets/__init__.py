"""Places to deploy to, a file each: a function from an order to its files, what explains them, and
how to start.
"""
