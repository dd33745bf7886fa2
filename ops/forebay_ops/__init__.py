"""Operations: the development inference server, tiny models and local tooling."""
