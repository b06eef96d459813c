"""One program in four languages: it writes ten orders, and reads ten as a member of a group, from where that ended.

Each takes the servers and a topic, and prints a line per order. None of them knows that the brokers are smq's nodes.
"""
