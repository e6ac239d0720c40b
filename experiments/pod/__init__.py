"""Parts of `experiments.compile_for_pod`: topologies, compilation, costs and reports."""
