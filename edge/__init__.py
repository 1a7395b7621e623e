"""The gateway that callers talk to. Text only: no tokenizer, no gRPC, no torch.

A request crosses it so: `api.openai` parses the body into a `GenerateRequest` → `admission` gives
a permit → `routing` hashes the prompt's beginning and orders the regions → `gateway` opens the
first that will have it, through `region_client` → `api.exchange` writes the events back as SSE or
as one answer. A caller who leaves cancels the whole way.

It refuses to know how text becomes tokens, which node serves a request, or what runs in a region.
"""
