"""The proof that a consumer keeps its contract, bound to its code, and the gate that asks for it in production."""
