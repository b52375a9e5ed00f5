"""The engine as algebra: pure functions over `EngineState`. Imports no model and no host shell."""
