"""compiler: where capture meets torch's compiler, and changes what it does."""
