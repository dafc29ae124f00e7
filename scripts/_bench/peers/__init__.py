"""The peers from the package index: a program each, set as its authors recommend.

python -m scripts._bench.peers.NAME VERB URL [...]   prints one JSON object; see `_program`
"""

from __future__ import annotations
