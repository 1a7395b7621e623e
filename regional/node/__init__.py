"""A node's front: the torch-free process between a region's router and the node's rank.

A request crosses it so. On a decode node `Reserve` becomes blocks set aside in the rank and a
ticket (`receiving`); the KV lands in the rank's memory over the data socket; `Start` makes the rank
generate, and each step's tokens become event frames (`answer`). On a prefill node `Prefill` makes
the rank read the prompt while finished blocks go out (`prefill`, `errands`). `front` joins
router (`session`) and rank (`rank_link`); `app` builds it all.

It decides nothing about placement, computes nothing, and never imports torch.
"""
