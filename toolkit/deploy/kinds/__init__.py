"""The kinds of objects that targets emit, as far as they emit them: strict models, dumped and never
pasted.
"""
