"""From torch to ONNX: the only place that converts, and every conversion ends in a parity gate.

encoder.py   a sentence-transformers model -> an encoder folder
convert.py   a trained model -> the model that ships
graph.py     what both share: one way to write a graph
"""

import dcl.runtime  # noqa: F401  before all else: it keeps the telemetry of onnxruntime off
