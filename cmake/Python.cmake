# The Python package: the binding rapt._core in the stable ABI, and beside it the library and the tool, as `pip install .`
# puts them into a wheel. The component "python" is all that goes there.
if(RAPT_INSTALL OR NOT TARGET rapt OR NOT TARGET rapt_tool)
  message(FATAL_ERROR "RAPT_BUILD_PYTHON needs RAPT_BUILD_SHARED and RAPT_BUILD_TOOL, and RAPT_INSTALL=OFF")
endif()
find_package(Python 3.9 REQUIRED COMPONENTS Interpreter Development.Module)

set(rapt_origin "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>")
Python_add_library(rapt_python MODULE
  python/src/arrays.c
  python/src/attention.c
  python/src/cache.c
  python/src/contexts.c
  python/src/fields.c
  python/src/fingerprint.c
  python/src/functional.c
  python/src/layer.c
  python/src/module.c
  python/src/sdpa.c
  python/src/state.c
  python/src/torch.c)
rapt_compile_options(rapt_python)
target_compile_definitions(rapt_python PRIVATE Py_LIMITED_API=0x03090000 _POSIX_C_SOURCE=200809L)
target_link_libraries(rapt_python PRIVATE rapt Threads::Threads)
set_target_properties(rapt_python PROPERTIES
  OUTPUT_NAME _core
  SUFFIX .abi3.so
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/python/rapt
  BUILD_RPATH "${rapt_origin};${PROJECT_BINARY_DIR}"
  INSTALL_RPATH "${rapt_origin}")
# A wheel has no links, so the library goes there once, under the name that programs ask for.
install(FILES $<TARGET_FILE:rapt> DESTINATION rapt RENAME $<TARGET_SONAME_FILE_NAME:rapt> COMPONENT python)
install(TARGETS rapt_python LIBRARY DESTINATION rapt COMPONENT python)
set_target_properties(rapt_tool PROPERTIES INSTALL_RPATH "${rapt_origin}/..")
install(TARGETS rapt_tool RUNTIME DESTINATION rapt/bin COMPONENT python)
