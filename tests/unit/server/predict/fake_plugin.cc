// Predictor libraries for tests: one that says a symbol's successor by number, and others with one fault each.
#include <cstdio>

#include "runtime/predict/plugin_abi.h"

namespace {

uint64_t last = 0;
int instances = 0;

void* Create(const misa_predictor_options* options, char* error, size_t error_bytes) {
#ifdef FAULT_CREATE
  std::snprintf(error, error_bytes, "%0600d", 7);  // longer than there is room for
  return nullptr;
#endif
  ++instances;
  return &last;
}

void Destroy(void*) { --instances; }

[[maybe_unused]] int Observe(void*, const uint64_t* symbols, size_t count, char* error, size_t error_bytes) {
#ifdef FAULT_OBSERVE
  std::snprintf(error, error_bytes, "the numbers ran away");
  return 1;
#endif
  if (count > 0) last = symbols[count - 1];
  return 0;
}

int Predict(void*, uint64_t* symbol, int* known, char*, size_t) {
  *symbol = last + 1;
  *known = last != 0;
  return 0;
}

const misa_predictor_plugin_v1 kPlugin = {
#ifdef FAULT_FOREIGN
    99,
#else
    MISA_PREDICTOR_ABI_VERSION,
#endif
    sizeof(misa_predictor_plugin_v1),
    "fake",
    Create,
    Destroy,
#ifdef FAULT_DAMAGED
    nullptr,
#else
    Observe,
#endif
    Predict};

}  // namespace

#ifndef FAULT_NO_ENTRY
extern "C" const misa_predictor_plugin_v1* misa_predictor_plugin(uint32_t abi_version) {
#ifdef FAULT_REFUSES
  return nullptr;
#endif
  return &kPlugin;
}
#else
extern "C" const misa_predictor_plugin_v1* something_else() { return &kPlugin; }
#endif
