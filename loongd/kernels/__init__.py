"""Operations on tensors, with no knowledge of serving."""
