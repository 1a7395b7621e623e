"""Text at the border of the model: messages → token ids, token ids → text. No torch, no weights.

A chat crosses this package as messages → `template` (sandboxed Jinja2) → text whose every piece
knows whether the model's template or the caller wrote it → `control` → ids. Ids come back through
a `writer`: `detokenizer` (whole characters only) → `stop` (nothing of a stop string is let out).

`model.load_text` builds all of it from a GGUF file or a folder. The package refuses what it cannot
do exactly: an unknown pre-tokenizer, a template that does not parse. It never cuts a prompt short
and never lets a caller's text become a control token.
"""
