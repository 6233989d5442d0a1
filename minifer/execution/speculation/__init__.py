"""Speculation: guess the next tokens cheaply, and let one pass of the model judge all of them.

A decode step reads every weight to compute one token; computing five costs hardly more. So a
*proposer* guesses k *drafts*, the model computes the newest token and the drafts in one pass, and
the sampler says at each place which token it would have taken::

    tokens so far        … the  quick  brown
    drafts                                    fox   jumps  under
    the model's choice                        fox   jumps  over    (after each of "brown fox jumps")
                                               ✓      ✓     ✗  → three new tokens for one pass

Drafts are right or wrong, never almost right: the reply is the one that the model would have
written alone. `proposer.py` says what a proposer is, and picks one:

    ngram.py        what followed the last n tokens when they occurred before
    draft_model.py  a smaller model of the same vocabulary, and loop models that draft with fewer
                    of their own iterations
    rejection.py    the rule of the papers for temperatures above 0, beside ours
"""
