"""Steps on a device that runs ahead of its host: what is captured when, what stays on the device.

`graphs` decides (pure); `sampler`, `inputs`, `pool` and `stepper` compute on any device, tested on
the CPU; `device` is the seam to streams, events and graphs, and `cuda` its real side. `rank` comes
up, alone or with others; `runner` leads and follows, in the words of `orders`; `groups` are the
sums of several ranks, over NCCL.
"""
