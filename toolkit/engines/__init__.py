"""What runs a model. The only place that imports torch, transformers and deepspeed, and only inside
what needs them.
"""
