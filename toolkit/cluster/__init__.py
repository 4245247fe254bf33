"""Ray: workers and trials on the machines of a cluster. Only commands that use Ray load it.

Ray pickles the actors' classes and a few functions by name, so every machine must have the
package. All later messages to workers are typed frames, as bytes. A cluster runs the code of any
client that reaches it, so it has a token.
"""
