"""Beside the path: loads that measure the engine as its users meet it. One module for each figure of `milepost bench`.

The law kept here: a bench says what it expects, and its exit status says whether that held.
"""
