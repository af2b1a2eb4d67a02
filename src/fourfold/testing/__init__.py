"""Test tools, for our tests and yours: ranks, a ledger of communication, a memory budget, emulated accelerators and networks."""
