"""The shared vocabulary of Skerry, and below it the engine.

The modules of this folder (types, errors, events, prefix, config, metrics, log) are what every
process speaks; they import the standard library, msgspec and prometheus_client, nothing heavier.

`core.text` turns messages into token ids and token ids into text (routers and node fronts);
`core.models` and `core.engine` compute (rank processes); `core.kv` keeps and moves the KV cache.

A request crosses this package as `GenerateRequest` → token ids → `StepPlan` → `Event`s.
"""
