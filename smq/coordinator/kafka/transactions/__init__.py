"""The keys of transactional producers, and those of the tools that look at them.

Empty on purpose: each module serves a few keys. Only `handlers` imports them.
"""
