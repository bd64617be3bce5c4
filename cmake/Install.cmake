# The header, the libraries, a CMake package (rapt::rapt, rapt::rapt_static), a pkg-config file, and the tool with its
# manual. All of it finds the rest by relative paths, so an installed tree may be moved.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/rapt)
set(installed)
foreach(target rapt rapt_static)
  if(TARGET ${target})
    list(APPEND installed ${target})
  endif()
endforeach()

install(DIRECTORY include/rapt DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS ${installed} EXPORT rapt-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT rapt-targets NAMESPACE rapt:: DESTINATION ${package_dir})

configure_package_config_file(cmake/rapt-config.cmake.in rapt-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(rapt-config-version.cmake COMPATIBILITY SameMinorVersion) # 0.x may break
install(FILES ${PROJECT_BINARY_DIR}/rapt-config.cmake ${PROJECT_BINARY_DIR}/rapt-config-version.cmake
  DESTINATION ${package_dir})

# pkg-config: the way from the .pc file's folder to the prefix, unless the folders were given as absolute paths.
set(pc_prefix ${CMAKE_INSTALL_PREFIX})
set(pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
set(pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
  endif()
endif()
configure_file(cmake/rapt.pc.in rapt.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/rapt.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET rapt_tool)
  if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" AND NOT IS_ABSOLUTE "${CMAKE_INSTALL_BINDIR}")
    file(RELATIVE_PATH libraries /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
    set_target_properties(rapt_tool PROPERTIES INSTALL_RPATH "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>/${libraries}")
  endif()
  install(TARGETS rapt_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(FILES tools/rapt/rapt.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES tools/rapt/completions/rapt.bash
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME rapt)
  install(FILES tools/rapt/completions/_rapt DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
  install(FILES tools/rapt/completions/rapt.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()
