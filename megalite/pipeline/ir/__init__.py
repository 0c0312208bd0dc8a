"""Pipeline schedules as data, without torch.

A generator builds a `Schedule` (forwards and backwards per rank), `lower` adds the communication, `validate` proves the
result correct, `simulate` predicts its timeline, `render_grid` draws it. The executor interprets the same lists.
"""
