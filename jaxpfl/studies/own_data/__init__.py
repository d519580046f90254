"""The user's own clients, from a file: estimates with intervals, and what they are worth on samples held out.

All of it is computed in double precision, which a file's numbers have: about a center of the data the private estimates
would not be private, and single precision about zero would lose what is small beside it.
"""
