"""Operations that torch does not have, or has slower."""
