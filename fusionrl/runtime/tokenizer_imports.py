"""What the Buffer imports to read a tokenizer, and whoever else does; the run's nursery imports it for them."""

from __future__ import annotations

from fusionrl.data.tokenizer import import_tokenizers

import_tokenizers()
