"""Every child process of llmctl: how it is started and told what to do, how the end or the silence
of a child is noticed, and what starts it again.
"""
