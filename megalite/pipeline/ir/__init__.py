"""Pipeline schedules as data, without torch.

A generator makes a `Schedule` (forwards and backwards a rank), `lower` adds the communication, `validate` proves the
result correct, `simulate` runs it on a clock, `render_grid` draws it. The executor interprets the same lists.
"""
