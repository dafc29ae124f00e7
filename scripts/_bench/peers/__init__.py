"""Programs for the peers from the package index, with the settings that their authors recommend.

python -m scripts._bench.peers.NAME VERB URL [...] prints one JSON object; see `_program`
"""

from __future__ import annotations
