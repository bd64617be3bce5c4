# Cross-compiling for 64-bit ARM with the distribution's compiler; ctest runs the programs under qemu's user mode.
# The C library they run with is the system's own for that architecture (libc6:arm64, which libcmocka-dev:arm64 brings).
# Not the cross compiler's, by -L: then the loader is one build of the C library and libc.so another, and threads hang.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
