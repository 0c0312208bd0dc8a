"""Pipeline schedules as data, without torch.

A generator builds a `Schedule` (forwards and backwards per rank), `lower` adds the communication, `validate` proves the
result correct, `simulate` predicts its timeline, `study` does all of it, `render_grid` draws it. The executor runs it.
"""
