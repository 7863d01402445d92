"""All that an SGLang server on a CPU imports, and its scheduler: both are forks of the process that imports this."""

from fusionrl.engines.launch_server import import_model, import_server

import_server()
import_model()
