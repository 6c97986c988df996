"""Compare drawn runs under each strategy with one device, or with an asynchronous oracle.

A :class:`~tests.differential.case.Case` says all of a run in plain values. ``check`` runs it twice
and lists what differs: logged values, hooks, outputs, progress, files. ``fixed`` has the cases of
the test command; ``python -m tests.differential`` (``make fuzz``) draws others.
"""
