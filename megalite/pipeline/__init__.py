"""Pipeline parallelism: `ir` (schedules as data, no torch), the channels between stages and the one executor."""
