"""Strict models of the objects that targets render, with only the fields that they use."""
