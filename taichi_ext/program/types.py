"""The scalar types of a program: names and properties, independent of Taichi."""

from __future__ import annotations

from dataclasses import dataclass

from taichi_ext.cached import cached_property


@dataclass(frozen=True, eq=False)
class Type:
    """A scalar type, named as in Taichi: ``f32``, ``i32``, ``u1``. Those of ``TYPES`` are known by their identity."""

    name: str

    @cached_property
    def is_real(self) -> bool:
        return self.name.startswith("f")

    @cached_property
    def is_integer(self) -> bool:
        return not self.is_real

    @cached_property
    def is_signed(self) -> bool:
        return not self.name.startswith("u")

    @cached_property
    def bits(self) -> int:
        return int(self.name[1:])

    def wrapped(self, number: int) -> int:
        """The number in this type of whole numbers for a result that may lie beyond its range."""
        if self.bits == 1:
            return int(number != 0)
        number %= 2**self.bits
        return number - 2**self.bits if self.is_signed and number >= 2 ** (self.bits - 1) else number

    def __repr__(self) -> str:
        return self.name


F16, F32, F64 = Type("f16"), Type("f32"), Type("f64")
I8, I16, I32, I64 = Type("i8"), Type("i16"), Type("i32"), Type("i64")
U1, U8, U16, U32, U64 = Type("u1"), Type("u8"), Type("u16"), Type("u32"), Type("u64")
TYPES = {t.name: t for t in (F16, F32, F64, I8, I16, I32, I64, U1, U8, U16, U32, U64)}
