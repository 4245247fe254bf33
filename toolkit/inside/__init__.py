"""The scheduler inside engines that have a scheduler of their own: it decides who runs, they do all
the rest.
"""
