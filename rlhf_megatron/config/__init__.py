"""Configs: `schema` says what there is and its defaults, `load` reads a file strictly, `checks` compares with the job.

Nothing here imports torch: a config is checked in a second, on a machine without one.
"""
