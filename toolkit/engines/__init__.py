"""Engines that run a model in our own processes, and their tokenizers.

Only this room imports torch, transformers and deepspeed, and only in modules that need them.
"""
