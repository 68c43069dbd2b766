# torch of the Python that the trainer's side is built for, as imported targets of our own: its CMake package asks for the
# CUDA toolkit even where only the CPU part is used.
execute_process(
  COMMAND ${MISA_PYTHON} -c "import os, torch; print(os.path.dirname(torch.__file__)); print(torch.__version__); print(int(torch._C._GLIBCXX_USE_CXX11_ABI))"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_result)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR "${MISA_PYTHON} has no torch: run \"make setup\", or build without the trainer's side (-DMISA_WITH_TORCH=OFF)")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 MISA_TORCH_DIR)
list(GET torch_facts 1 MISA_TORCH_VERSION)
list(GET torch_facts 2 MISA_TORCH_ABI)
execute_process(
  COMMAND ${MISA_PYTHON} -c "import sysconfig; print(sysconfig.get_path('include')); print(sysconfig.get_config_var('EXT_SUFFIX'))"
  OUTPUT_VARIABLE python_facts OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE "\n" ";" python_facts "${python_facts}")
list(GET python_facts 0 MISA_PYTHON_INCLUDE)
list(GET python_facts 1 MISA_PYTHON_SUFFIX)

add_library(misa_torch_imported INTERFACE)
target_include_directories(misa_torch_imported SYSTEM INTERFACE
  ${MISA_TORCH_DIR}/include ${MISA_TORCH_DIR}/include/torch/csrc/api/include)
# NDEBUG as torch itself was built: without it some of its classes get more members, and the layouts differ.
target_compile_definitions(misa_torch_imported INTERFACE _GLIBCXX_USE_CXX11_ABI=${MISA_TORCH_ABI} NDEBUG)
target_link_directories(misa_torch_imported INTERFACE ${MISA_TORCH_DIR}/lib)
# --no-as-needed: operators register themselves when the libraries load, nothing else refers to some of them.
target_link_libraries(misa_torch_imported INTERFACE
  -Wl,--no-as-needed torch torch_cpu c10 -Wl,--as-needed)
target_link_options(misa_torch_imported INTERFACE -Wl,-rpath,${MISA_TORCH_DIR}/lib)
